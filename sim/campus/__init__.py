"""Campus churn studies: owners who come and go, jobs that move, and policies that are held against each other."""
