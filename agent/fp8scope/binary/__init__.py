"""Binary layouts that other tools' files have: protocol buffers, read and written, and CRC-32C."""
