"""Joins the rooms: collect samples, analyse them, publish the result."""
