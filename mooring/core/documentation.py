"""Addresses of the documentation's pages, for messages that users of an installed package read."""

from __future__ import annotations

DOCUMENTATION_URL = "https://mooring.example.org"  # to be replaced when the site is published


def page_url(page: str) -> str:
    """The address of a page of the documentation, given without its ending: "privacy"."""
    return f"{DOCUMENTATION_URL}/{page}/"
