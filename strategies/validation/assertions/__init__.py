"""assert_rule and assert_sharding: rules and placements under property-based test."""
