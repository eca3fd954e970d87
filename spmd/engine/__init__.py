"""One program on one logical device, recorded on a driver and run by many workers."""
