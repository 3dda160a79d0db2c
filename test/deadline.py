"""When a test gives up: one generous number, because a test that passes never waits for it and machines are busy otherwise."""
GIVE_UP = 60.0  # seconds, for what takes a fraction of one
