"""Only here, at the root, may pytest be told of fixtures that live in a module of their own."""

pytest_plugins = ["tests.fixtures_model"]
