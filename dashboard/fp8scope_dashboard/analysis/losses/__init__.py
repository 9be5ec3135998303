"""The verdict on a training loss. `verdict.compare_losses` is the entry; everything here is a pure function
of arrays.
"""
