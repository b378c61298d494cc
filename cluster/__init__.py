"""Tandem: LLM serving with speculative decoding and paired target/draft KV pools."""
