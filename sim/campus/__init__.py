"""Campus studies: machines whose owners come and go, jobs that move, and policies to compare."""
