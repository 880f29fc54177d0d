"""Small runs to judge: what a healthy one looks like, to be changed in one place a test."""

from dataclasses import replace

from equivtest.records import Arm, Comparison
from equivtest.verdict.facts import ROLES, ConfigFacts, Confirmation, Extreme, Finding, Flag, Place, RunFacts

ROWS = 8 * 32 * 256


def config_facts(config="topp95", **changes) -> ConfigFacts:
    healthy = ConfigFacts(
        config=config,
        rows_expected=dict.fromkeys(Arm, ROWS),
        rows_found=dict.fromkeys(Arm, ROWS),
        num_samples=2_048,
        num_spec_samples=2_048,
        num_drafted=90_000,
        num_accepted=54_000,
        plain_reasons={},
    )
    return replace(healthy, **changes)


def plain_facts(config="minp05") -> ConfigFacts:
    return config_facts(
        config, num_spec_samples=0, num_drafted=0, num_accepted=0, plain_reasons={"min_p is not supported": 2_048}
    )


def run_facts(*configs, **changes) -> RunFacts:
    return replace(RunFacts(configs=configs or (config_facts(),), planted_fault="acceptance bias of 0.10"), **changes)


def flags(number, config="topp95", prompt_id="code", p_value=1e-4):
    return tuple(
        Flag(
            place=Place(config, prompt_id, position),
            p_value=p_value,
            effect=0.31,
            effect_by_chance=0.17,
            words="total variation distance 0.31 where 0.17 is usual",
        )
        for position in range(number)
    )


def finding(comparison, flagged=(), *, configs=("topp95",), family="marginal", confirmation=None) -> Finding:
    return Finding(
        family=family,
        role=ROLES[Comparison(comparison)],
        subject=Comparison(comparison).words,
        unit="cells",
        num_tests=dict.fromkeys(configs, 256),
        flagged=flagged,
        smallest_p=min((flag.p_value for flag in flagged), default=0.4),
        level=0.05,
        method="chi-squared",
        extremes=(Extreme(name="largest total variation distance", value=0.28, by_chance=0.22,
                          place=Place("topp95", "story", 7)),),
        confirmation=confirmation,
    )  # fmt: skip


def confirmation(tested, confirmed=()) -> Confirmation:
    return Confirmation(
        alpha=0.01,
        num_samples=1_024,
        tested=tuple(flag.place for flag in tested),
        confirmed=confirmed,
        smallest_p=min((flag.p_value for flag in confirmed), default=0.3),
    )


def findings(off_on=(), on_on_null=(), off_biased=None, *, stage_2=None, null_stage_2=None, configs=("topp95",)):
    """The three findings of a run; a healthy one by default."""
    biased = sum((flags(72, config) for config in configs), ()) if off_biased is None else off_biased
    return [
        finding("off_on", off_on, configs=configs, confirmation=stage_2),
        finding("on_on_null", on_on_null, configs=configs, confirmation=null_stage_2),
        finding("off_biased", biased, configs=configs),
    ]
