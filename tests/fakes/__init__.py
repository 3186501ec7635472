"""Small stand-ins that make engine tests fast; see each file."""
