"""Models of the package transformers, at tiny sizes, with random weights and dropout off."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from zoo_models.registry import BF16, OWN_STREAM, Call, Made, model

WORDS = 97
#: the names that configurations give to the same few sizes
SMALL = {"vocab_size": WORDS, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
HEADS = {"num_attention_heads": 4}
CALM = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def made(name: str, config: str, **values: Any) -> Any:
    """The class `name` with a configuration of the class `config`, in evaluation mode."""
    import transformers

    return getattr(transformers, name)(getattr(transformers, config)(**values)).eval()


def words(*shape: int) -> torch.Tensor:
    return torch.randint(3, WORDS, shape)


def reading(fn: nn.Module, *shapes: tuple[int, int]) -> Made:
    return fn, [Call((), {"input_ids": words(*shape)}) for shape in shapes]


def looking(fn: nn.Module, size: int, name: str = "pixel_values") -> Made:
    return fn, [Call((), {name: torch.randn(2, 3, size, size)}) for _ in range(2)]


@model(
    "BERT with padding masks; trained",
    under=("no_grad", "grad"),
    session=True,
    reason="the gradient of the keys' bias is zero but for rounding, for softmax does not see what all scores share",
)
def bert() -> Made:
    fn = made("BertForSequenceClassification", "BertConfig", **SMALL, **HEADS, **CALM)
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[1, 7:] = 0
    labels = torch.tensor([0, 1])
    return fn, [Call((), {"input_ids": words(2, 12), "attention_mask": mask, "labels": labels}) for _ in range(2)]


@model("GPT-2; outputs are a ModelOutput with a cache; trained; tied embeddings", under=("no_grad", "grad"))
def gpt2() -> Made:
    calm = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    fn = made("GPT2LMHeadModel", "GPT2Config", vocab_size=WORDS, n_embd=32, n_layer=2, n_head=4, n_positions=32, **calm)
    ids = [words(2, 12), words(2, 12)]
    return fn, [Call((), {"input_ids": one, "labels": one, "use_cache": False}) for one in ids]


@model("GPT-2 with its own dropout, in training mode", under=("grad",), reason=OWN_STREAM)
def gpt2_dropout() -> Made:
    fn = made("GPT2LMHeadModel", "GPT2Config", vocab_size=WORDS, n_embd=32, n_layer=1, n_head=4, n_positions=32)
    return fn, [Call((), {"input_ids": words(2, 12), "use_cache": False}) for _ in range(2)]


@model("Llama: grouped queries, rotary positions; a longer sequence the second time", session=True)
def llama() -> Made:
    fn = made("LlamaForCausalLM", "LlamaConfig", **SMALL, **HEADS, num_key_value_heads=2)
    return reading(fn, (2, 12), (2, 12), (2, 17))


@model("Llama in bf16", under=("inference_mode",), tolerance=BF16)
def llama_bf16() -> Made:
    fn = made("LlamaForCausalLM", "LlamaConfig", **SMALL, **HEADS, num_key_value_heads=2).to(torch.bfloat16)
    return reading(fn, (2, 12), (2, 12))


@model("T5: encoder and decoder, relative positions; trained", under=("no_grad", "grad"))
def t5() -> Made:
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 1, "num_heads": 4, "dropout_rate": 0.0}
    fn = made("T5ForConditionalGeneration", "T5Config", vocab_size=WORDS, decoder_start_token_id=0, **sizes)
    pairs = [(words(2, 12), words(2, 6)) for _ in range(2)]
    return fn, [Call((), {"input_ids": source, "labels": target}) for source, target in pairs]


@model("Mixtral: a sparse mixture of experts, routed by data", under=("inference_mode",))
def mixtral() -> Made:
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    small = {**SMALL, "num_hidden_layers": 1}
    return reading(
        made("MixtralForCausalLM", "MixtralConfig", **small, **HEADS, num_key_value_heads=2, **experts), (2, 8)
    )


@model("Mamba: a selective scan as transformers writes it")
def mamba() -> Made:
    small = {"vocab_size": WORDS, "hidden_size": 32, "num_hidden_layers": 1, "state_size": 4}
    fn = made("MambaForCausalLM", "MambaConfig", **small, use_cache=False)
    return reading(fn, (2, 6), (2, 6))


@model("ViT", under=("no_grad", "inference_mode"), session=True)
def vit() -> Made:
    small = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "image_size": 16, "patch_size": 4}
    return looking(made("ViTForImageClassification", "ViTConfig", **small, **HEADS), 16)


@model("Swin: shifted windows, rolls", under=("no_grad",))
def swin() -> Made:
    small = {"image_size": 16, "patch_size": 2, "embed_dim": 16, "depths": [2], "num_heads": [2], "window_size": 4}
    return looking(made("SwinModel", "SwinConfig", **small), 16)


@model("DETR: set prediction on a ResNet; outputs of several kinds")
def detr() -> Made:
    import transformers

    sizes: dict[str, Any] = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "out_features": ["stage2"]}
    backbone = transformers.ResNetConfig(**sizes, layer_type="basic")
    small = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "num_queries": 5, "num_labels": 3}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    feed = {"encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
    own = {"backbone_config": backbone, "use_timm_backbone": False, "backbone": None}
    return looking(made("DetrForObjectDetection", "DetrConfig", **small, **heads, **feed, **own), 32)


@model("Whisper: speech, convolutions before attention, encoder and decoder")
def whisper() -> Made:
    small = {"vocab_size": WORDS, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "num_mel_bins": 8}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
    feed = {"encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_source_positions": 10, "max_target_positions": 16}
    marks = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    fn = made("WhisperForConditionalGeneration", "WhisperConfig", **small, **heads, **feed, **marks)
    calls = [{"input_features": torch.randn(2, 8, 20), "decoder_input_ids": words(2, 5)} for _ in range(2)]
    return fn, [Call((), kwargs) for kwargs in calls]


@model("wav2vec 2.0: convolutions over sound, weight norm as a parametrization")
def wav2vec2() -> Made:
    small = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 20}
    front = {"conv_dim": [16, 16], "conv_kernel": [10, 3], "conv_stride": [5, 2]}
    around = {"num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4, "num_feat_extract_layers": 2}
    fn = made("Wav2Vec2ForCTC", "Wav2Vec2Config", **small, **HEADS, **front, **around)
    return fn, [Call((), {"input_values": torch.randn(2, 400)}) for _ in range(2)]


@model("FNet: a Fourier transform over words (complex numbers inside)")
def fnet() -> Made:
    return reading(made("FNetModel", "FNetConfig", **SMALL, hidden_dropout_prob=0.0), (2, 12), (2, 12))


@model("CLIP: two towers, and an output that is a nested ModelOutput")
def clip() -> Made:
    tower = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = {**tower, "vocab_size": WORDS, "max_position_embeddings": 16, "eos_token_id": 2, "bos_token_id": 1}
    vision = {**tower, "image_size": 16, "patch_size": 4}
    fn = made("CLIPModel", "CLIPConfig", text_config=text, vision_config=vision, projection_dim=8)
    calls = [{"input_ids": words(2, 6), "pixel_values": torch.randn(2, 3, 16, 16)} for _ in range(2)]
    return fn, [Call((), kwargs) for kwargs in calls]


class Decoding(nn.Module):
    """Greedy decoding, one word a call, into a static cache that is written in place."""

    def __init__(self) -> None:
        super().__init__()
        import transformers

        small = {**SMALL, "num_hidden_layers": 1}
        self.inner = made("LlamaForCausalLM", "LlamaConfig", **small, **HEADS, num_key_value_heads=2)
        self.cache = transformers.StaticCache(config=self.inner.config, max_cache_len=8)

    def forward(self, ids: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        out = self.inner(
            input_ids=ids,
            past_key_values=self.cache,
            position_ids=position[None],
            cache_position=position,
            use_cache=True,
        )
        return out.logits[:, -1].argmax(-1)


@model("Llama decoding into transformers' static cache")
def llama_decode() -> Made:
    return Decoding(), [(words(1, 1), torch.tensor([step])) for step in range(3)]
