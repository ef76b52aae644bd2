"""What the model is given to practise on, and what masking leaves of it."""

from __future__ import annotations

from posttrain.doctor.catalog.shared import CUT, HELDOUT_RISING, MASTERED, SAME_TEXT
from posttrain.doctor.combined import AllOf, Early, Event, OneOf, Setting
from posttrain.doctor.entries import Action, Entry, Layer, Status, Tier, Verdict
from posttrain.doctor.signals import Change, Flat, Gap, Level
from posttrain.doctor.trends import Steady

ENTRIES = (
    Entry(
        "S40",
        "too easy from the first step",
        Status.LIVED,
        Layer.DATA,
        Verdict.SATURATED,
        symptom="nearly every group is all right before anything was trained",
        onset="step 0",
        cause="the model already solves these tasks: base success near 100 %",
        fix="harder prompts; keep those with a success rate of 20-80 %",
        check="posttrain probe: the buckets of 64 prompts",
        source="book, ch. 18 and appendix M",
        tier=Tier.LEADING,
        signs=(
            OneOf(
                (
                    Early(Level("all_right", ">", 0.8, last=3, stat="every"), rows=8),
                    AllOf((Early(Level("reward_mean", ">", 0.97, last=3, stat="every"), 8), Level("reward_mean", "<=", 1.001))),
                )
            ),
        ),
        confused={"S4": "the tasks became easy while training", "S35": "the grader rewards anything"},
    ),
    Entry(
        "S41",
        "most prompts teach nothing",
        Status.LIVED,
        Layer.DATA,
        Verdict.DEAD,
        symptom="80 % of the groups or more agree from the start, some all right and some all wrong",
        onset="step 0",
        cause="the data are easy and impossible prompts with little between",
        fix="filter to the learnable band by the probe, or dynamic sampling at the price of the prompts thrown away",
        check="posttrain probe; tries_per_kept says what dynamic sampling pays",
        source="book, ch. 18",
        tier=Tier.LEADING,
        signs=(
            Early(Level("zero_variance", ">", 0.8, last=3, stat="every"), rows=10),
            Level("all_right", ">", 0.1, last=3),
            Level("all_wrong", ">", 0.1, last=3),
        ),
        against=(CUT, MASTERED, SAME_TEXT),
        confused={"F2": "the band was left while training", "S2": "none is right"},
    ),
    Entry(
        "S42",
        "everything is cut",
        Status.LIVED,
        Layer.CONFIGURATION,
        Verdict.DEAD,
        symptom="nearly every answer ends at the token budget, and reward is flat at 0; it looks like a failure of the algorithm",
        onset="step 0; a budget of 256 tokens cut 100 %, 1,024 cut about 3 %",
        cause="sampling.max_tokens is below what the model writes",
        fix="raise sampling.max_tokens, or shorten the prompts' demands",
        check="length_p95 against sampling.max_tokens",
        source="book, ch. 7",
        tier=Tier.LEADING,
        signs=(Level("truncated", ">", 0.8, last=3),),
        confused={
            "S2": "answers are whole, and wrong",
            "S43": "the share grew while training",
            "P19": "the policy already drifts to one string",
        },
    ),
    Entry(
        "S43",
        "more and more answers are cut",
        Status.LIVED,
        Layer.CONFIGURATION,
        Verdict.DRIFTING,
        symptom="the share of answers that reach the token budget grows; the response clip ratio went to 1 in a hacked run",
        onset="steps 50-300",
        cause="answers grow into the limit: length bias, or a reward that pays length",
        fix="find what pays for length first (F3); raise the budget only if right answers need it",
        check="length_right against length_wrong",
        source="book, ch. 32",
        tier=Tier.MIDDLE,
        signs=(
            OneOf(
                (
                    Steady("truncated", ">=", 0.1, over=15),
                    Change("truncated", ">=", 0.15, over=15),
                    Change("truncated", ">=", 0.15, over=45),
                )
            ),
            Level("truncated", ">", 0.15, last=5),
        ),
        against=(Level("truncated", ">", 0.98, last=5),),
        confused={"S42": "all are cut from the first step"},
    ),
    Entry(
        "S44",
        "masking starves the groups",
        Status.LIVED,
        Layer.DATA,
        Verdict.DEAD,
        symptom="a masking flag leaves too few siblings to disagree: 6 of 8 rollouts masked in one run, reward flat, loss silent",
        onset="as soon as answers grow",
        cause="over-long filtering or another mask drops more than 25 % of the rollouts, or leaves the middle group fewer than 3",
        fix="raise sampling.max_tokens, or do not mask: objective.overlong=ramp instead of drop",
        check="survivors_median and dropped, by reason in left_*",
        source="book, ch. 24",
        tier=Tier.LEADING,
        signs=(
            OneOf(
                (
                    Level("dropped", ">", 0.25, last=2),
                    AllOf((Level("survivors_median", "<", 3.0, last=2), Level("dropped", ">", 0.1, last=2))),
                    Event("overlong_starves"),
                )
            ),
        ),
        against=(
            Level("errors", ">", 0.1, last=2),
            AllOf((Setting("objective.advantage.kind", "==", "median_mad"), Level("dropped", "<", 0.4, last=2))),
        ),
        confused={"S42": "cut answers train as wrong ones; nothing is masked"},
    ),
    Entry(
        "S45",
        "training set learned by heart",
        Status.LIVED,
        Layer.DATA,
        Verdict.DRIFTING,
        symptom="training reward rises far above the held-out score, which stays flat",
        onset="after a few passes over a small set (280 instances in one run)",
        cause="too few different tasks",
        fix="more tasks; stop at the held-out score's last rise",
        check="the number of different task ids in rollouts/*.jsonl",
        source="book, ch. 67",
        tier=Tier.LAGGING,
        signs=(
            Flat("heldout_mean", 0.02, over=6),
            Gap("reward_mean", "heldout_mean", ">", 0.3, last=3),
            Level("reward_mean", ">", 0.75, last=5),
            OneOf((Change("reward_mean", ">=", 0.1, over=45), Change("reward_mean", ">=", 0.1, over=90))),
        ),
        against=(HELDOUT_RISING,),
        confused={"S20": "the held-out score falls"},
    ),
    Entry(
        "S46",
        "few groups are left to train on",
        Status.MEASURED,
        Layer.DATA,
        Verdict.SATURATED,
        symptom="dynamic sampling throws away most of what is generated: more than 5 groups per group kept",
        onset="late, or from the start with unsuitable data",
        cause="most prompts are outside of the learnable band",
        fix="harder or easier data by the split of all_right and all_wrong",
        check="tries_per_kept times the seconds of sampling",
        source="book, ch. 6 and 13",
        tier=Tier.MIDDLE,
        signs=(Level("tries_per_kept", ">", 5.0, last=5),),
        action=Action.NOTE,
        confused={"S4": "what is thrown away is all right"},
    ),
)
