from strategies.model.rule import Leaf as Leaf
