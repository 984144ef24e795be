"""Programs that measure: every number in the docs comes from a command here."""
