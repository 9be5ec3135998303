"""Commands to a training process, reference windows and bisections."""
