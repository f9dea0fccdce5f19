"""`mooring app`: a page on this machine that takes an analyst from a table to a report."""
