"""Looks into a running system or a bundle: questions, reasons, rules, health."""
