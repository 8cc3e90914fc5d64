"""Attention for sm_90 in Gluon: `support.reasons_against(spec)`, then `launch.forward` and `launch.backward`."""
