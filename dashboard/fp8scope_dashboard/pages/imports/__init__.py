"""The page of imports: upload files of other tools, and see what became of them."""
