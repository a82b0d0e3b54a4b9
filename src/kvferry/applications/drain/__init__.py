"""`kvferry drain`: lets engines and endpoints leave without a failed request."""
