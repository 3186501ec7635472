"""What one rank remembers (request_table, kv_store) and what one step needs (model_input)."""
