"""Tests of the planning wing."""
