"""Operations of routers and experts, one folder each.

    __init__.py     the operation's public functions; each chooses between PyTorch and Triton by itself
    naive.py        the mathematics in a few plain lines, which tests compare the fast versions with; where one function
                    is enough, it is in __init__.py and its name ends with `_reference`
    triton.py       Triton kernels and the functions that launch them; imported only where Triton can run

    fp32_linear     products that stay float32                    select        top-k, its smooth strip, and weights
    clusters        statistics and scaled features of clusters    token_mixing  attention-like mixing of rows
    attention       what routers read from attention              grouped       rows sorted by expert, and their products
    statistics      exact quantiles and running means             balance       the balance loss
    finite          report NaN and infinity by layer

    float32_parts   float32 numbers as sums of 16-bit parts (Triton)
    operators       registering operators, launching kernels, second derivatives
    torch_internals all private interfaces of PyTorch             quantised     weights that other libraries have quantised

Nothing here knows routers or models: the rest of the package may import `kernels`; `kernels` imports only torch and Triton.
"""
