"""Residuals, which decide how a layer's output reaches later layers."""
