"""Residuals: how a layer's output reaches later layers."""
