"""What becomes of the fields of a request for embeddings."""

from __future__ import annotations

from collections.abc import Mapping

from service.schemas.field_rules import FieldRule, honoured, no_op

EMBEDDING_FIELDS: Mapping[str, FieldRule] = {
    "input": honoured("text, token ids, or a list of either: up to 2048, none empty or longer than the model takes"),
    "model": honoured("the served name of the embedding model, exactly"),
    "encoding_format": honoured("`float` or `base64`, of four little-endian bytes a number"),
    "dimensions": honoured("the first so many, scaled to length 1; only where the model was made for it"),
    "user": no_op("nothing is kept about users"),
}
