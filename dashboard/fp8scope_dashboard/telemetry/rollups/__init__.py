"""Roll-ups at growing strides: when to build them, how to build them, how to read them."""
