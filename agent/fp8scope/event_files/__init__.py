"""Event files of TensorBoard: a reader without TensorBoard, and the upload of a log directory that grows.

`protobuf` and `framing` read bytes, `events` what they mean, `log_run` the files of one directory in order,
`attempts` finds restarts of the training, `row_streams` makes rows, and `upload` sends them exactly once.
"""
