"""The experts of a mixture in FP8: layers over sorted tokens, and modules with weights for each expert."""
