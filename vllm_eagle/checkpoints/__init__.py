"""Look at heads, and write them in another layout: the commands `inspect` and `convert`."""
