"""Fixtures for the tests in this folder; they live in browser_fixtures."""

from browser_fixtures import browser, open_page, serve_echo, watch

__all__ = ["browser", "open_page", "serve_echo", "watch"]
