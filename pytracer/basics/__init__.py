"""Units, names, files, the driver and torch's private names: what every room may use."""
