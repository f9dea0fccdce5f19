"""All that a person sees: the terminal, figures, pages. Works from plain tables and run directories; trains nothing."""
