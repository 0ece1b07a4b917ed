"""Events, their folds, and the program of a rank."""
