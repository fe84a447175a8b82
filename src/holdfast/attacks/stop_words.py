"""English words that carry grammar rather than meaning; attacks on words leave them alone."""

_WORDS = """
    a about above after again against all also am an and any are as at be because been before being below between both but
    by can cannot could did do does doing down during each either else ever few for from further had has have having he
    her here hers herself him himself his how however i if in into is it its itself just let may me might mine more most
    must my myself neither no nor not now of off on once only onto or other our ours ourselves out over own per quite
    rather same shall she should since so some such than that the their theirs them themselves then there these they this
    those though through thus to too toward towards under until unto up upon us very was we were what whatever when
    where whether which while who whom whose why will with within without would yet you your yours yourself yourselves
    aren't can't couldn't didn't doesn't don't hadn't hasn't haven't he'd he'll he's i'd i'll i'm i've isn't it's let's
    mustn't shan't she'd she'll she's shouldn't that's there's they'd they'll they're they've wasn't we'd we'll we're we've
    weren't what's won't wouldn't you'd you'll you're you've
    d ll m re s t ve aren couldn didn doesn don hadn hasn haven isn mustn shan shouldn wasn weren won wouldn
"""  # the last line: what tokenised text makes of don't and we'll, "don 't" and "we 'll"

STOP_WORDS = frozenset(_WORDS.split())
