"""Extra columns for linear models: natural splines, products of columns, and a boosted-tree score."""
