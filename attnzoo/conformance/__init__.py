"""`pytest --pyargs attnzoo.conformance --attn-backend NAME -n auto` judges any installed backend."""
