"""What clients and server say to each other, and how answers are put together."""
