"""Log -> drift verdict, report."""
