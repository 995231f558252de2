"""Who is asking: identity -> trust domain -> salt; registered shared prefixes.

Reading order: `identity` (the values), `authenticator` (headers -> identity), `stamp` (identity -> engine),
`salt`, `shared_prefix`, `engine_side` (stamp -> salts of blocks), `metrics`.
"""
