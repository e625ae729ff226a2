"""Request log, process log and spans."""
