"""The Responses API: /v1/responses."""
