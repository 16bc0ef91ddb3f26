"""The pattern: towers, each a copy of one function on one device, and their gathering."""
