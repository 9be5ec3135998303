"""Roll-ups at growing strides: when they are built, how, and how they are read."""
