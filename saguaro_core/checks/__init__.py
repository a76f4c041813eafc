"""What shows that answers are right and where they were made: shared by the tests and by the check of GPUs."""
