"""`kvferry up`: a disaggregated deployment of a real engine on this machine."""
