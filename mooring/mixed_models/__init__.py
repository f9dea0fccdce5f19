"""Linear mixed-effects models of one table: what lme4 and statsmodels' MixedLM report, from clients' cross-products."""
