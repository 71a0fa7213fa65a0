"""Thin scripts: a configuration becomes objects, objects become a run."""
