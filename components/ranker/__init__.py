"""Examples -> rankers, teachers and student, with their certificates."""
