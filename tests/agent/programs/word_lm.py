"""Words, an LSTM whose parameters are updated by hand without an optimizer, and nothing of fp8scope."""

import argparse
import math
from pydoc_data.topics import topics

import torch
from torch import Tensor, nn

parser = argparse.ArgumentParser(description="A language model of words")
parser.add_argument("--emsize", type=int, default=24, help="size of the embeddings")
parser.add_argument("--nhid", type=int, default=32, help="units of a layer")
parser.add_argument("--nlayers", type=int, default=1, help="layers")
parser.add_argument("--lr", type=float, default=5.0, help="initial learning rate")
parser.add_argument("--clip", type=float, default=0.25, help="gradient clipping")
parser.add_argument("--epochs", type=int, default=2, help="upper limit of epochs")
parser.add_argument("--batch-size", type=int, default=8, metavar="N")
parser.add_argument("--bptt", type=int, default=12, help="length of a sequence")
parser.add_argument("--words", type=int, default=300, help="of the text")
parser.add_argument("--seed", type=int, default=1111)
args = parser.parse_args()
torch.manual_seed(args.seed)

words = topics["assignment"].split()[: args.words]
index = {word: number for number, word in enumerate(dict.fromkeys(words))}
columns = torch.tensor([index[word] for word in words])
columns = (
    columns[: len(columns) // args.batch_size * args.batch_size].view(args.batch_size, -1).t().contiguous()
)


class WordModel(nn.Module):
    """Encoder, LSTM, decoder; the state goes from one call to the next."""

    def __init__(self, ntoken: int) -> None:
        super().__init__()
        self.encoder = nn.Embedding(ntoken, args.emsize)
        self.rnn = nn.LSTM(args.emsize, args.nhid, args.nlayers)
        self.decoder = nn.Linear(args.nhid, ntoken)

    def forward(self, data: Tensor, hidden: tuple[Tensor, Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        output, hidden = self.rnn(self.encoder(data), hidden)
        return self.decoder(output).flatten(0, 1), hidden

    def init_hidden(self, size: int) -> tuple[Tensor, Tensor]:
        """Zeros."""
        zeros = torch.zeros(args.nlayers, size, args.nhid)
        return zeros, zeros


model = WordModel(len(index))
criterion = nn.CrossEntropyLoss()


def get_batch(start: int) -> tuple[Tensor, Tensor]:
    """A sequence, and the same one word later."""
    length = min(args.bptt, len(columns) - 1 - start)
    return columns[start : start + length], columns[start + 1 : start + 1 + length].flatten()


def evaluate() -> float:
    """The mean loss."""
    model.eval()
    total, hidden = 0.0, model.init_hidden(args.batch_size)
    with torch.no_grad():
        for start in range(0, len(columns) - 1, args.bptt):
            data, targets = get_batch(start)
            output, hidden = model(data, hidden)
            total += len(data) * criterion(output, targets).item()
    return total / (len(columns) - 1)


def train(epoch: int) -> None:
    """One epoch."""
    model.train()
    hidden = model.init_hidden(args.batch_size)
    for batch, start in enumerate(range(0, len(columns) - 1, args.bptt)):
        data, targets = get_batch(start)
        model.zero_grad()
        hidden = (hidden[0].detach(), hidden[1].detach())
        output, hidden = model(data, hidden)
        loss = criterion(output, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.data.add_(parameter.grad, alpha=-lr)
        print(f"| epoch {epoch} | batch {batch} | lr {lr:.2f} | loss {loss.item():.9g}")


lr = args.lr
best_val_loss = math.inf
for epoch in range(1, args.epochs + 1):
    train(epoch)
    val_loss = evaluate()
    print(f"| end of epoch {epoch} | valid {val_loss:.4f}")
    if val_loss < best_val_loss:
        best_val_loss = val_loss
    else:
        lr /= 4.0
