"""assert_rule and assert_sharding."""
