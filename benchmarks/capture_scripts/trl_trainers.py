"""TRL's trainers of supervised fine-tuning, DPO and GRPO, on a model and a tokenizer that are made here."""

import sys

import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

WORDS = ["hello world", "abc abc abc", "the quick brown fox", "zzz"]
SETTINGS = {
    "output_dir": "out",
    "max_steps": 6,
    "per_device_train_batch_size": 4,
    "logging_steps": 1,
    "report_to": ["tensorboard", "fp8scope"],
    "use_cpu": True,
    "bf16": False,
    "disable_tqdm": True,
    "save_strategy": "no",
    "gradient_checkpointing": False,
}


def tokenizer():
    vocabulary = {
        token: i for i, token in enumerate(["<pad>", "<eos>", "<unk>", *"abcdefghijklmnopqrstuvwxyz "])
    }
    letters = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    letters.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    letters.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=letters, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def model():
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    ids = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 1}
    return LlamaForCausalLM(LlamaConfig(vocab_size=30, max_position_embeddings=64, **sizes, **ids))


def letters(completions, **_):
    return [float(len(set(text))) for text in completions]


def trainer(kind):
    parts = {"model": model(), "processing_class": tokenizer()}
    if kind == "sft":
        data = Dataset.from_dict({"text": WORDS * 8})
        return SFTTrainer(args=SFTConfig(**SETTINGS), train_dataset=data, **parts)
    if kind == "dpo":
        pairs = {"prompt": ["abc "] * 16, "chosen": ["abc"] * 16, "rejected": ["zzz"] * 16}
        data = Dataset.from_dict(pairs)
        return DPOTrainer(ref_model=model(), args=DPOConfig(**SETTINGS), train_dataset=data, **parts)
    settings = GRPOConfig(**SETTINGS, num_generations=4, max_completion_length=8)
    data = Dataset.from_dict({"prompt": WORDS * 8})
    return GRPOTrainer(reward_funcs=letters, args=settings, train_dataset=data, **parts)


trainer(sys.argv[1]).train()
