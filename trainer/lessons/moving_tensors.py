"""Moving tensors and models to a device, the error of a forgotten move, and its cure."""

import torch

# Without a GPU, "meta" is the other device here: it knows shapes and holds no numbers.
other = "cuda" if torch.cuda.is_available() else "meta"
x = torch.tensor([1.0, 2.0, 3.0])
y = torch.ones(3, device=other)
print(f"x is on {x.device}, y is on {y.device}")

try:
    print(x + y)
except RuntimeError as error:
    print(f"x + y fails: {error}")

total = x.to(other) + y  # the cure: both on one device before they meet
print(f"x.to({other!r}) + y works, on {total.device}")
print(f"x itself stayed on {x.device}: to() makes a new tensor")
print(f"where there is nothing to move, to() copies nothing: {x.to('cpu') is x}")

model = torch.nn.Linear(3, 1)
model.to(other)  # a module moves itself: no assignment needed
print(f"the model's weight is now on {model.weight.device}")
print(f"model(y) works: {tuple(model(y).shape)} on {model(y).device}")
