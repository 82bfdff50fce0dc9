"""The training of the shipped network `digits_cnn`: writes digits_cnn.safetensors to the current folder."""

from pathlib import Path

from safetensors.torch import save_file

import onlynorm as on
from onlynorm.data import digits
from onlynorm.models import make_model
from onlynorm.tuning import accuracy

data = digits()
model = make_model("digits_cnn")
schedule = on.Schedule(epochs=20, batch_size=64, lr=0.1, seed=0)
on.fit(model, (data.train_inputs, data.train_labels), schedule=schedule)

correct = 100 * accuracy(model, (data.test_inputs, data.test_labels))
print(f"{len(data.test_inputs)} test images: {correct:.1f} % accuracy")
path = Path("digits_cnn.safetensors")
save_file(model.state_dict(), path)
print(f"wrote {path}, {path.stat().st_size:,} bytes")
